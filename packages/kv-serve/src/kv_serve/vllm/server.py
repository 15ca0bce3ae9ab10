"""vLLM's own server, with the options that a policy needs."""

import os
from argparse import Namespace
from collections.abc import Sequence
from typing import Final

from vllm import envs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kv_policy import KVPolicy, parse
from kv_runtime import expect_known
from kv_serve.vllm import adapters, middleware, plain
from kv_serve.vllm.attach import connector, is_ours
from kv_serve.vllm.config import check_settings, is_plain
from kv_serve.vllm.names import BACKEND, DOCUMENTS, KEY, TURNS

logger = init_logger("vllm.kv_serve")

RESERVED: Final = "VLLM_CPU_NUM_OF_RESERVED_CPU"  # cores on which no worker computes


def read(arguments: Sequence[str]) -> Namespace:
    """Parse the command line of `vllm serve` as vLLM does; exit with its message if it is invalid.

    vLLM's own command is not called, as it exits if there is no distribution named vllm, which CPU
    builds lack. This function and `run` do the same for `serve`.
    """
    adapters.set_up_environment()
    parser = FlexibleArgumentParser(prog="kv-serve")
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    given: Namespace = parser.parse_args(["serve", *arguments])
    return given


def run(given: Namespace) -> None:
    """Serve until a signal arrives."""
    command = ServeSubcommand()
    adapters.configure_logging(given)
    command.validate(given)
    command.cmd(given)


def apply_policy(
    given: Namespace,
    text: str | None,
    backend: str | None = None,
    folder: str | None = None,
    *,
    turns: bool = False,
) -> None:
    """Set the options that a policy needs; do nothing if neither `text` nor the options name one.

    Args:
        given: vLLM's options, changed in place.
        text: the policy; None: only `additional_config` may name one.
        backend: the backend of attention and pages; None: only `additional_config` may name one.
        folder: of documents; None: only `additional_config` may name one.
        turns: whether the states of finished requests are stored; False: only `additional_config`
            may say so.

    Raises:
        ValueError: an option of vLLM conflicts, the policy or the backend is unknown, or there is a
            backend without a policy.
    """
    config = given.additional_config
    asked = {
        KEY: ("--policy", text),
        BACKEND: ("--kv-backend", backend),
        DOCUMENTS: ("--documents", folder),
    }
    own = {key: value for key, (_, value) in asked.items() if value is not None}
    for key, value in own.items():
        if config.get(key, value) != value:
            raise ValueError(
                f"{asked[key][0]} is {value} and {key} in --additional-config is {config[key]}; "
                "omit one of them"
            )
    settings = {**config, **own} | ({TURNS: True} if turns else {})
    check_settings(settings)
    if KEY not in settings:
        return
    policy = parse(settings[KEY])
    if BACKEND in settings:
        expect_known(settings[BACKEND])
    given.additional_config = settings
    _add_middleware(given, middleware.PATH)
    _choose_storage(given, policy)
    if current_platform.is_cuda():
        _choose_backend(given)
    if envs.VLLM_USE_RUST_FRONTEND:
        logger.warning(
            "budgets of requests are checked in vLLM's Python servers; in the Rust server a "
            "request with a bad kv_budget fails in its first step, or runs without a budget "
            "if the policy has one format for all tokens"
        )


def _add_middleware(given: Namespace, path: str) -> None:
    if path not in given.middleware:
        given.middleware = [*given.middleware, path]


def _choose_storage(given: Namespace, policy: KVPolicy) -> None:
    """Configure our connector so that the process that serves metrics also sees it.

    Which connectors of vLLM a policy without pages may have is checked with the whole
    configuration.
    """
    asked = given.kv_transfer_config
    if asked is not None and is_plain(policy) == is_ours(asked):
        raise ValueError(
            f"--kv-transfer-config names {asked.kv_connector}, but the policy {policy} cannot be "
            "served with this KV connector; omit the option"
        )
    if is_plain(policy):
        _add_middleware(given, plain.PATH)
        return
    if asked is None:
        given.kv_transfer_config = connector()
    if current_platform.is_cpu():
        _keep_cores(given.tensor_parallel_size)


def _keep_cores(ranks: int) -> None:
    """Let vLLM reserve a core for each rank, as it does without a KV connector.

    With any connector it reserves one more, for threads that copy, of which ours has none.
    """
    if RESERVED not in os.environ:
        os.environ[RESERVED] = str(ranks)
        logger.info(
            "%s is set to %d, as this KV connector needs no core; vLLM warns that it is low",
            RESERVED,
            ranks,
        )


def _choose_backend(given: Namespace) -> None:
    ours = AttentionBackendEnum.CUSTOM.name
    chosen = given.attention_backend
    if chosen is not None and chosen.upper() not in ("AUTO", ours):
        raise ValueError(
            f"--attention-backend is {chosen}, but a policy needs {ours}; omit the option"
        )
    given.attention_backend = ours
