# One image for CPU and GPU. Build:  docker build --tag ridgeline .
# GPU:  docker run --gpus all --init -p 8000:8000 -e RIDGELINE_API_KEY=… -v /models:/models:ro \
#         -v ridgeline:/home/ridgeline/.cache/ridgeline ridgeline serve /models/Llama-3.1-8B --host 0.0.0.0
#       Models by name: -v ~/.cache/huggingface:/home/ridgeline/.cache/huggingface … ridgeline serve Qwen/Qwen3-8B --host 0.0.0.0
# CPU:  docker run --init -p 8000:8000 -e RIDGELINE_API_KEY=… ridgeline
# CI does not build this file.
FROM python:3.12-slim

# gcc compiles the CPU kernels now, and Triton's launchers when a GPU is first used.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY ridgeline ridgeline
RUN pip install --no-cache-dir ".[fast]" \
 && rm -rf /src/build /src/*.egg-info

# The server does not need root. The cache directory must belong to its user alone.
RUN useradd --create-home --uid 1000 ridgeline
USER ridgeline
WORKDIR /home/ridgeline
RUN mkdir --parents --mode=700 .cache/ridgeline \
 && ridgeline pull --quiet \
 && ridgeline build
VOLUME /home/ridgeline/.cache/ridgeline

# The NVIDIA container toolkit mounts the driver for these capabilities.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 8000
HEALTHCHECK --start-period=5m CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["ridgeline"]
CMD ["serve", "--host", "0.0.0.0"]
