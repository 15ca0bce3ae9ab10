# kv-serve in vLLM's own image for NVIDIA GPUs. Build it from the root of the repository:
#
#   docker build -f deploy/cuda.Dockerfile -t kv-serve:cuda .
#   docker run --rm --gpus all --ipc host -p 8000:8000 kv-serve:cuda Qwen/Qwen3-8B --policy k8v4

ARG VLLM=0.33.0

FROM python:3.12-slim-bookworm AS wheels
ENV PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1
RUN pip install "uv>=0.9,<1"
COPY packages /packages
# Native code for CPUs is left out.
RUN rm -r /packages/kv-cpu \
    && for package in /packages/*/; do uv build --wheel --out-dir /wheels "$package" || exit 1; done

FROM vllm/vllm-openai:v${VLLM}
COPY --from=wheels /wheels /wheels
# Only what the image lacks is installed: vLLM, torch and transformers stay.
RUN uv pip install --system --no-cache /wheels/*.whl && rm -rf /wheels
EXPOSE 8000
ENTRYPOINT ["kv-serve", "serve"]
