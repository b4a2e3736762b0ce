# Hilt with its simulator, formats, the browser's pages and VLA policies.
#
#   docker build --target cpu -t hilt .                      # give --build-arg TORCH_INDEX=URL for torch's builds without CUDA
#   docker build --target cuda -t hilt:cuda .                # torch's default wheels, which contain CUDA
#   docker run --rm -it -v "$PWD:/workspace" hilt demo --fast
#   docker run --rm -it --gpus all -v "$PWD:/workspace" hilt:cuda train vla_debug device=cuda

FROM python:3.12-slim AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
COPY docs ./docs
COPY examples ./examples
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim AS base
RUN apt-get update \
    && apt-get install -y --no-install-recommends libegl1 libgl1 libgl1-mesa-dri libgles2 libosmesa6 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home hilt
ENV PYTHONUNBUFFERED=1
COPY --from=wheel /wheels /wheels
WORKDIR /workspace
ENTRYPOINT ["hilt"]
CMD ["--help"]

FROM base AS cpu
ARG TORCH_INDEX=""
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
    "$(echo /wheels/hilt-*.whl)[torch,zstd,formats,sim,robot,teleop,serve,vla,tensorboard]"
USER hilt

FROM base AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,graphics,utility
RUN pip install --no-cache-dir "$(echo /wheels/hilt-*.whl)[torch,zstd,formats,sim,robot,teleop,serve,vla,cluster,tensorboard]"
USER hilt
