# draftsmith on a machine with an NVIDIA GPU:
#   docker build -t draftsmith .
#   docker run --gpus all -v "$PWD:/work" -v "$HOME/.cache:/root/.cache" draftsmith run recipe.yaml
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# python3-dev: torch.compile and Triton build with the headers; git: setuptools-scm reads the version.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PATH="/opt/draftsmith/bin:$PATH"
RUN python3 -m venv /opt/draftsmith && pip install --no-cache-dir "torch>=2.11"
COPY . /src
RUN pip install --no-cache-dir "/src[gguf,serve,language]"
WORKDIR /work
ENTRYPOINT ["draftsmith"]
CMD ["--help"]
