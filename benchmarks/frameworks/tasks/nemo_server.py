"""Serves a resources server of NeMo Gym at a port: nemo_server.py MODULE CLASS PORT."""

import sys
from importlib import import_module

import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

module, name, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
kind = getattr(import_module(module), name)
where = {"host": "127.0.0.1", "port": port}
client = ServerClient(head_server_config=BaseServerConfig(**where), global_config_dict=OmegaConf.create({}))
config = kind.model_fields["config"].annotation(name=name, entrypoint="app.py", **where)
uvicorn.run(kind(config=config, server_client=client).setup_webserver(), **where)
