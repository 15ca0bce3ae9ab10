"""The connector by which workers tell the scheduler of pages, in a configuration that has none."""

from typing import Final

from vllm.config import KVTransferConfig, VllmConfig

MODULE: Final = "kv_serve.vllm.connector"
CLASS: Final = "PagesConnector"


def attach(config: VllmConfig) -> None:
    """Let vLLM make our connector, in the worker and beside the scheduler.

    vLLM reads this part of the configuration once the model is loaded, so a policy in
    `additional_config` is all that users give.
    """
    if config.kv_transfer_config is None:
        config.kv_transfer_config = KVTransferConfig(
            kv_connector=CLASS, kv_connector_module_path=MODULE, kv_role="kv_both"
        )


def is_ours(config: VllmConfig) -> bool:
    """Say whether the configuration's connector is ours."""
    given = config.kv_transfer_config
    return given is not None and (given.kv_connector, given.kv_connector_module_path) == (
        CLASS,
        MODULE,
    )
