"""Attach the connector that reports pages to the scheduler, if none is configured."""

from typing import Final

from vllm.config import KVTransferConfig, VllmConfig

MODULE: Final = "kv_serve.vllm.connector"
CLASS: Final = "PagesConnector"
ATTACHED: Final = "attached"  # in the connector's extra config; other processes do not see it


def connector() -> KVTransferConfig:
    """Return the KV transfer configuration of our connector, for all of vLLM's processes."""
    return KVTransferConfig(kv_connector=CLASS, kv_connector_module_path=MODULE, kv_role="kv_both")


def attach(config: VllmConfig) -> None:
    """Configure our connector, so that vLLM creates it in the worker and the scheduler.

    vLLM reads this part of the configuration after the model is loaded, so users only need a policy
    in `additional_config`.
    """
    if config.kv_transfer_config is None:
        config.kv_transfer_config = connector()
        config.kv_transfer_config.kv_connector_extra_config[ATTACHED] = True


def is_ours(given: KVTransferConfig | None) -> bool:
    """Return whether the configuration names our connector."""
    return given is not None and (given.kv_connector, given.kv_connector_module_path) == (
        CLASS,
        MODULE,
    )


def is_heard(config: VllmConfig) -> bool:
    """Return whether the process that serves metrics has our connector configured.

    It fails on metrics of a connector that its own copy of the configuration does not name.
    """
    given = config.kv_transfer_config
    return is_ours(given) and not given.kv_connector_extra_config.get(ATTACHED, False)
