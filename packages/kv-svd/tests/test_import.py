"""The package works alone, and importing it is cheap."""

import subprocess
import sys


def test_importing_it_brings_no_host_and_no_kernel_compiler() -> None:
    code = "import sys, kv_svd; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "kv_svd" in loaded
    assert not loaded & {"transformers", "triton", "vllm", "kv_quant", "kv_evict", "kv_serve"}
