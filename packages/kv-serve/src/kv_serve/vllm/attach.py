"""Attach the connector that reports pages to the scheduler, if none is configured."""

from typing import Final

from vllm.config import KVTransferConfig, VllmConfig

MODULE: Final = "kv_serve.vllm.connector"
CLASS: Final = "PagesConnector"
ATTACHED: Final = "attached"  # in the connector's extra config; other processes do not see it
STORES: Final = "stores_prefixes"  # also there: vLLM's prefix cache is disabled, and ours is not


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


def disable_prefix_cache(config: VllmConfig) -> None:
    """Disable vLLM's prefix cache, after `attach`; our own prefixes are stored as before."""
    if config.cache_config.enable_prefix_caching:
        config.cache_config.enable_prefix_caching = False
        assert config.kv_transfer_config is not None, "our connector is attached"
        config.kv_transfer_config.kv_connector_extra_config[STORES] = True


def stores_prefixes(config: VllmConfig, *, plain: bool) -> bool:
    """Return whether prefixes are stored: by vLLM under a plain format, and else by us.

    Beside layers with states vLLM's prefix cache is disabled, and ours costs nothing unless it is
    asked for.
    """
    if config.cache_config.enable_prefix_caching:
        return True
    given = config.kv_transfer_config
    if given is not None and is_ours(given) and given.kv_connector_extra_config.get(STORES):
        return True
    return not plain and bool(config.model_config.is_hybrid)


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
