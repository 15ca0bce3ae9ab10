"""The options of vLLM's server that a policy sets, and those it leaves unchanged."""

import os
from argparse import Namespace

import pytest

PATH = "kv_serve.vllm.middleware.BudgetCheck"
PLAIN = "kv_serve.vllm.plain.PlainMetrics"
SELECTED = "kv-compress:rate=2+k8v4"


def options(*arguments: str) -> Namespace:
    from kv_serve.vllm.server import read

    return read(["some/model", *arguments])


def applied(policy: str | None, *arguments: str, backend: str | None = None) -> Namespace:
    from kv_serve.vllm.server import apply_policy

    given = options(*arguments)
    apply_policy(given, policy, backend)
    return given


def changed(given: Namespace, *arguments: str) -> dict[str, object]:
    stock = vars(options(*arguments))
    return {name: value for name, value in vars(given).items() if value != stock[name]}


def test_without_a_policy_every_option_is_as_it_was() -> None:
    assert changed(applied(None)) == {}
    mine = ("--additional-config", '{"mine": 1}', "--middleware", "my.Middleware")
    assert changed(applied(None, *mine), *mine) == {}


def test_a_policy_adds_its_text_the_check_of_budgets_and_metrics() -> None:
    wanted = {"additional_config": {"kv_policy": "k8v4"}, "middleware": [PATH, PLAIN]}
    assert changed(applied("k8v4")) == wanted


@pytest.mark.parametrize(
    "mine", [("--additional-config", '{"mine": 1}'), ("--additional-config.mine", "1")]
)
def test_what_the_user_says_is_kept(mine: tuple[str, str]) -> None:
    given = applied("k8v4", *mine, "--middleware", "my.Middleware")
    assert given.additional_config == {"mine": 1, "kv_policy": "k8v4"}
    assert given.middleware == ["my.Middleware", PATH, PLAIN]


def test_a_policy_in_the_additional_config_gets_the_check_too() -> None:
    named = ("--additional-config", '{"kv_policy": "k8v4"}')
    assert applied(None, *named).middleware == [PATH, PLAIN]
    assert applied("k8v4", *named, "--middleware", PATH).middleware == [PATH, PLAIN]


def test_two_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="--policy is k8v4 and kv_policy in --additional"):
        applied("k8v4", "--additional-config", '{"kv_policy": "k4v2"}')


def test_a_backend_may_be_named_beside_a_policy() -> None:
    named = ("--additional-config", '{"kv_backend": "torch"}')
    wanted = {"kv_policy": "k8v4", "kv_backend": "torch"}
    assert applied("k8v4", backend="torch").additional_config == wanted
    assert applied("k8v4", *named).additional_config == wanted
    assert applied("k8v4", *named, backend="torch").additional_config == wanted


@pytest.mark.parametrize(
    ("policy", "backend", "config", "said"),
    [
        (None, "torch", "{}", "kv_backend is torch and there is no kv_policy"),
        (None, None, '{"kv_backend": "torch"}', "kv_backend is torch and there is no kv_policy"),
        ("k8v4", "fast", "{}", "unknown backend 'fast'; choose one of"),
        ("k8v4", "torch", '{"kv_backend": "cpu"}', "--kv-backend is torch and kv_backend in"),
        ("k8v4", None, '{"kv_backend": 1}', "kv_backend is 1; give the name of a backend"),
    ],
)
def test_a_backend_that_means_nothing_is_refused(
    policy: str | None, backend: str | None, config: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        applied(policy, "--additional-config", config, backend=backend)


def test_a_policy_in_pages_names_its_connector_where_metrics_are_served() -> None:
    from kv_serve.vllm.attach import is_ours

    given = applied(SELECTED)
    assert given.middleware == [PATH]
    assert is_ours(given.kv_transfer_config)
    assert not given.kv_transfer_config.kv_connector_extra_config


def test_prefix_caching_is_as_asked() -> None:
    for text in ("k8v4", SELECTED):
        assert applied(text).enable_prefix_caching is options().enable_prefix_caching
        for on in (True, False):
            option = f"--{'' if on else 'no-'}enable-prefix-caching"
            assert applied(text, option).enable_prefix_caching is on


def test_our_connector_may_be_named_by_hand() -> None:
    ours = ("--kv-transfer-config.kv_connector", "PagesConnector")
    ours += ("--kv-transfer-config.kv_connector_module_path", "kv_serve.vllm.connector")
    ours += ("--kv-transfer-config.kv_role", "kv_both")
    given = applied(SELECTED, *ours)
    assert given.kv_transfer_config.kv_connector == "PagesConnector"
    with pytest.raises(ValueError, match="PagesConnector, but the policy k8v4 cannot be served"):
        applied("k8v4", *ours)


def test_another_connector_is_refused_beside_pages() -> None:
    other = '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'
    with pytest.raises(ValueError, match=r"names ExampleConnector, but the policy .* omit the opt"):
        applied(SELECTED, "--kv-transfer-config", other)
    given = applied("k8v4", "--kv-transfer-config", other)
    assert given.kv_transfer_config.kv_connector == "ExampleConnector"
    assert changed(applied(None, "--kv-transfer-config", other)).keys() == {"kv_transfer_config"}


@pytest.mark.parametrize(
    ("policy", "plain"),
    [
        ("k8v4", True),
        ("bf16", True),
        ("k4v4:keys=channel,block=32,window=32", False),
        ("streaming", False),
        ("leankv", False),
        (SELECTED, False),
    ],
)
def test_which_policies_are_plain_is_known_without_a_model(policy: str, plain: bool) -> None:
    from kv_policy import parse
    from kv_serve.vllm.config import is_plain

    assert is_plain(parse(policy)) is plain


class Gpu:
    """A platform that claims to be CUDA."""

    def is_cuda(self) -> bool:
        return True

    def is_cpu(self) -> bool:
        return False


def test_on_a_gpu_our_backend_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    from kv_serve.vllm import server

    monkeypatch.setattr(server, "current_platform", Gpu())
    assert applied("k8v4").attention_backend == "CUSTOM"
    chosen = ("--attention-backend", "CUSTOM")
    assert applied("k8v4", *chosen).attention_backend == "CUSTOM"
    assert applied(None).attention_backend is None
    with pytest.raises(ValueError, match="--attention-backend is FLASH_ATTN, but a policy needs"):
        applied("k8v4", "--attention-backend", "FLASH_ATTN")


@pytest.mark.parametrize(
    ("policy", "arguments", "mine", "reserved"),
    [
        (SELECTED, (), None, "1"),
        (SELECTED, ("--tensor-parallel-size", "2"), None, "2"),
        (SELECTED, (), "3", "3"),  # the user's
        ("k8v4", (), None, None),  # it has no connector
    ],
)
def test_no_core_is_reserved_for_our_connector(
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    arguments: tuple[str, ...],
    mine: str | None,
    reserved: str | None,
) -> None:
    from kv_serve.vllm.server import RESERVED

    monkeypatch.setenv(RESERVED, "undone after the test")
    if mine is None:
        monkeypatch.delenv(RESERVED)
    else:
        monkeypatch.setenv(RESERVED, mine)
    applied(policy, *arguments)
    assert os.environ.get(RESERVED) == reserved


@pytest.mark.model
def test_our_connector_leaves_as_many_cores_as_vllm_has_without_one(
    monkeypatch: pytest.MonkeyPatch, smollm2: str
) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    from kv_serve.vllm.server import RESERVED, apply_policy, read

    monkeypatch.setenv(RESERVED, "undone after the test")
    monkeypatch.delenv(RESERVED)
    given = read([smollm2])
    given.model = given.model_tag  # as the command does
    alone = OMPProcessManager(EngineArgs.from_cli_args(given).create_engine_config())
    apply_policy(given, SELECTED)
    ours = OMPProcessManager(EngineArgs.from_cli_args(given).create_engine_config())
    assert ours.reserve_cpu_num == alone.reserve_cpu_num


def test_errors_of_vllms_own_options_come_through(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        options("--no-such-option")
    assert left.value.code == 2
    assert "unrecognized arguments: --no-such-option" in capsys.readouterr().err
