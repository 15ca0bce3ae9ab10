"""vLLM's own server, with what a policy needs of its options."""

from argparse import Namespace
from collections.abc import Sequence

from vllm import envs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kv_policy import KVPolicy, parse
from kv_serve.vllm import adapters, middleware, plain
from kv_serve.vllm.attach import connector, is_ours
from kv_serve.vllm.config import check_settings, is_plain
from kv_serve.vllm.names import KEY

logger = init_logger("vllm.kv_serve")


def read(arguments: Sequence[str]) -> Namespace:
    """Read the command line of `vllm serve`, as vLLM does, and leave with its words if it is wrong.

    vLLM's own command is not called: it asks for the version of a distribution that the builds for
    CPUs do not have, and ends. All that it would do for `serve` is here and in `run`.
    """
    cli_env_setup()
    parser = FlexibleArgumentParser(prog="kv-serve")
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    given: Namespace = parser.parse_args(["serve", *arguments])
    return given


def run(given: Namespace) -> None:
    """Serve until a signal comes."""
    command = ServeSubcommand()
    adapters.configure_logging(given)
    command.validate(given)
    command.cmd(given)


def apply_policy(given: Namespace, text: str | None) -> None:
    """Set what serving a policy needs; where neither `text` nor the options name one, nothing.

    Args:
        given: vLLM's options, changed in place.
        text: the policy's; None leaves it to `additional_config`.

    Raises:
        ValueError: an option of vLLM says something else, or there is no such policy.
    """
    config = given.additional_config
    check_settings(config)
    named = config.get(KEY, text)
    if named is None:
        return
    if text is not None and named != text:
        raise ValueError(
            f"--policy is {text} and {KEY} in --additional-config is {named}; leave one of them out"
        )
    policy = parse(str(named))
    given.additional_config = {**config, KEY: named}
    _add_middleware(given, middleware.PATH)
    _choose_metrics(given, policy)
    if current_platform.is_cuda():
        _choose_backend(given)
    if envs.VLLM_USE_RUST_FRONTEND:
        logger.warning(
            "budgets of requests are checked in vLLM's servers in Python; in the one in Rust a "
            "request with a bad kv_budget fails in its first step, or goes on without a budget "
            "where the policy has one format for all tokens"
        )


def _add_middleware(given: Namespace, path: str) -> None:
    if path not in given.middleware:
        given.middleware = [*given.middleware, path]


def _choose_metrics(given: Namespace, policy: KVPolicy) -> None:
    """Name our connector where the process that serves metrics sees it, too."""
    asked = given.kv_transfer_config
    if asked is not None and (is_plain(policy) or not is_ours(asked)):
        raise ValueError(
            f"--kv-transfer-config names {asked.kv_connector}, and the policy {policy} cannot be "
            "served with a KV connector of yours; leave the option out"
        )
    if is_plain(policy):
        _add_middleware(given, plain.PATH)
    elif asked is None:
        given.kv_transfer_config = connector()


def _choose_backend(given: Namespace) -> None:
    ours = AttentionBackendEnum.CUSTOM.name
    chosen = given.attention_backend
    if chosen is not None and chosen.upper() not in ("AUTO", ours):
        raise ValueError(
            f"--attention-backend is {chosen}, and a policy is served by {ours}; leave the option "
            "out"
        )
    given.attention_backend = ours
