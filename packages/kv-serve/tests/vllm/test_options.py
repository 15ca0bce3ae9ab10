"""What a policy adds to the options of vLLM's server, and what it leaves as it is."""

from argparse import Namespace

import pytest

PATH = "kv_serve.vllm.middleware.BudgetCheck"


def options(*arguments: str) -> Namespace:
    from kv_serve.vllm.server import read

    return read(["some/model", *arguments])


def applied(policy: str | None, *arguments: str) -> Namespace:
    from kv_serve.vllm.server import apply_policy

    given = options(*arguments)
    apply_policy(given, policy)
    return given


def changed(given: Namespace, *arguments: str) -> dict[str, object]:
    stock = vars(options(*arguments))
    return {name: value for name, value in vars(given).items() if value != stock[name]}


def test_without_a_policy_every_option_is_as_it_was() -> None:
    assert changed(applied(None)) == {}
    mine = ("--additional-config", '{"mine": 1}', "--middleware", "my.Middleware")
    assert changed(applied(None, *mine), *mine) == {}


def test_a_policy_adds_its_text_and_the_check_of_budgets() -> None:
    wanted = {"additional_config": {"kv_policy": "k8v4"}, "middleware": [PATH]}
    assert changed(applied("k8v4")) == wanted


@pytest.mark.parametrize(
    "mine", [("--additional-config", '{"mine": 1}'), ("--additional-config.mine", "1")]
)
def test_what_the_user_says_is_kept(mine: tuple[str, str]) -> None:
    given = applied("k8v4", *mine, "--middleware", "my.Middleware")
    assert given.additional_config == {"mine": 1, "kv_policy": "k8v4"}
    assert given.middleware == ["my.Middleware", PATH]


def test_a_policy_in_the_additional_config_gets_the_check_too() -> None:
    named = ("--additional-config", '{"kv_policy": "k8v4"}')
    assert applied(None, *named).middleware == [PATH]
    assert applied("k8v4", *named, "--middleware", PATH).middleware == [PATH]


def test_two_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="--policy is k8v4 and kv_policy in --additional"):
        applied("k8v4", "--additional-config", '{"kv_policy": "k4v2"}')


class Gpu:
    """A platform that is CUDA in name."""

    def is_cuda(self) -> bool:
        return True


def test_on_a_gpu_our_backend_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    from kv_serve.vllm import server

    monkeypatch.setattr(server, "current_platform", Gpu())
    assert applied("k8v4").attention_backend == "CUSTOM"
    chosen = ("--attention-backend", "CUSTOM")
    assert applied("k8v4", *chosen).attention_backend == "CUSTOM"
    assert applied(None).attention_backend is None
    with pytest.raises(ValueError, match="--attention-backend is FLASH_ATTN, and a policy is serv"):
        applied("k8v4", "--attention-backend", "FLASH_ATTN")


def test_errors_of_vllms_own_options_come_through(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        options("--no-such-option")
    assert left.value.code == 2
    assert "unrecognized arguments: --no-such-option" in capsys.readouterr().err
