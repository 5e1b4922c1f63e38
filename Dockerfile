# The project and all that it needs: `docker build --tag agent_r1 .` for a CPU, with `--target cuda` for NVIDIA's GPUs.
# Any user may run it, known to the image or not, as long as the group is 0, which it is unless said otherwise.
FROM debian:bookworm-slim AS base
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates g++ git libnuma1 make openssh-client procps python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && git config --system --add safe.directory /project \
    && mkdir --mode 2775 /home/agent
ENV HOME=/home/agent USER=agent PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /project
# Packages first, so that other code needs no new ones; the project's own are installed as the folders that come below.
COPY Makefile pyproject.toml README.md LICENSE ./
COPY requirements requirements
RUN mkdir agent_r1 flows && touch agent_r1/__init__.py flows/__init__.py

FROM base AS cuda
RUN make INSTALL=gpu VENV=../opt/venv ../opt/venv/.installed && rm -rf /home/agent/.cache
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY . .
RUN ln -s /opt/venv .venv && chmod -R g=u /project /home/agent
USER 1001
CMD ["agent-r1", "pipeline"]

FROM base AS cpu
RUN make INSTALL=cpu VENV=../opt/venv ../opt/venv/.installed && rm -rf /home/agent/.cache
COPY . .
RUN ln -s /opt/venv .venv && chmod -R g=u /project /home/agent
USER 1001
CMD ["agent-r1", "pipeline"]
