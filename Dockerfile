# An image that starts without compiling: docs/baking.md says how to build and run it.
#
#   docker build -t fusewright-abacus .
#   docker build -t fusewright-llama \
#     --build-context model=/models/Llama-3-8B --build-arg MODEL=/model .

ARG BUILD_IMAGE=docker.io/nvidia/cuda:13.0.1-devel-ubuntu24.04
ARG FINAL_IMAGE=docker.io/nvidia/cuda:13.0.1-base-ubuntu24.04

# Empty; --build-context model=FOLDER takes its place. Only config.json of it is read.
FROM scratch AS model

FROM ${BUILD_IMAGE} AS build
ARG TORCH=2.11.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv
RUN python3 -m venv /opt/fusewright/venv
ENV PATH=/opt/fusewright/venv/bin:${PATH}
# Before the sources, so that editing them does not download torch again.
RUN pip install --no-cache-dir --index-url ${TORCH_INDEX} torch==${TORCH}
RUN pip install --no-cache-dir scikit-build-core cmake ninja
COPY pyproject.toml CMakeLists.txt README.md LICENSE __init__.py py.typed /src/
COPY tools /src/tools
COPY csrc /src/csrc
COPY config /src/config
COPY ops /src/ops
COPY passes /src/passes
COPY compiler /src/compiler
COPY graph_capture /src/graph_capture
COPY model_executor /src/model_executor
COPY engine /src/engine
COPY serve /src/serve
COPY bench /src/bench
# Without isolation, because csrc/ is compiled against the torch that will run it.
RUN pip install --no-cache-dir --no-build-isolation -C kernels=on "/src[sign,serve]"
# No GPU is needed at -O2; the architecture is named instead. Whatever decides the code (level,
# passes, kernels, dtype, block size) must be the same in CMD: it is in the artifact's key.
ARG MODEL=abacus
ARG COMPILE_FLAGS="-O2 --target-sm 90"
RUN --mount=type=bind,from=model,target=/model \
    fusewright compile "${MODEL}" ${COMPILE_FLAGS} --compile-cache-dir /opt/fusewright/artifacts \
    && fusewright cache verify --compile-cache-dir /opt/fusewright/artifacts \
    && chmod -R a-w /opt/fusewright/artifacts

# Neither nvcc nor a C compiler: a start that needed one would fail here.
FROM ${FINAL_IMAGE}
RUN apt-get update && apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --no-create-home --home-dir /nonexistent fusewright
ENV PATH=/opt/fusewright/venv/bin:${PATH}
# At the same path: the environment's scripts name it.
COPY --from=build /opt/fusewright/venv /opt/fusewright/venv
# Only what is read; locks and times of use stay behind. A start searches
# /opt/fusewright/artifacts first, without being told, and trusts files of root that only root may
# write.
COPY --from=build /opt/fusewright/artifacts/artifacts /opt/fusewright/artifacts/artifacts
USER 10001:10001
WORKDIR /
EXPOSE 8000
# All addresses of the container: give it --api-key-file where others reach them.
CMD ["fusewright", "serve", "abacus", "-O2", "--require-cache", "--host", "0.0.0.0"]
