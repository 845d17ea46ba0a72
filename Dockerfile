# The image that helm/dspark runs: this project, its pinned dependencies and the shipped drafter, for an ordinary user.
#
#   docker build -t dspark-serve:0.1.0 --build-arg PIP_EXTRA_INDEX_URL=<an index of CPU builds of torch> .
#
# Without the argument pip brings torch's CUDA build. To bake a model in, add it to an image made FROM this one and name
# its folder in model_loading_config.model_source.
FROM python:3.11-slim-bookworm

ARG PIP_EXTRA_INDEX_URL=""
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

WORKDIR /opt/dspark
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY drafter drafter
COPY cluster cluster
COPY deployments deployments

# As in the Makefile: torch first and pinned, then the rest. Editable, so that drafter/checkpoints is found beside the code.
RUN pip install --no-cache-dir "$(grep '^torch==' constraints.txt)" \
 && pip install --no-cache-dir --constraint constraints.txt --editable .

RUN useradd --uid 1000 --create-home dspark
USER 1000:1000
