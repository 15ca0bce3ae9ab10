"""The connector by which workers tell the scheduler of pages, in a configuration that has none."""

from typing import Final

from vllm.config import KVTransferConfig, VllmConfig

MODULE: Final = "kv_serve.vllm.connector"
CLASS: Final = "PagesConnector"
ATTACHED: Final = "attached"  # among the connector's own options: no other process knows of it


def connector() -> KVTransferConfig:
    """Give what names our connector, for a configuration that all of vLLM's processes see."""
    return KVTransferConfig(kv_connector=CLASS, kv_connector_module_path=MODULE, kv_role="kv_both")


def attach(config: VllmConfig) -> None:
    """Let vLLM make our connector, in the worker and beside the scheduler.

    vLLM reads this part of the configuration once the model is loaded, so a policy in
    `additional_config` is all that users give.
    """
    if config.kv_transfer_config is None:
        config.kv_transfer_config = connector()
        config.kv_transfer_config.kv_connector_extra_config[ATTACHED] = True


def is_ours(given: KVTransferConfig | None) -> bool:
    """Say whether it names our connector."""
    return given is not None and (given.kv_connector, given.kv_connector_module_path) == (
        CLASS,
        MODULE,
    )


def is_heard(config: VllmConfig) -> bool:
    """Say whether the process that serves metrics knows of our connector.

    It fails on metrics of a connector that its own copy of the configuration does not name.
    """
    given = config.kv_transfer_config
    return is_ours(given) and not given.kv_connector_extra_config.get(ATTACHED, False)
