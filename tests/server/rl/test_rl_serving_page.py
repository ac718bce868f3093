"""The pages list every route that a server of a language model has, and no other."""

import re
from pathlib import Path

from starlette.routing import Route

from phalanx.schema.server_config import ServerConfig
from phalanx.server.app import create_app
from tests.server.server_process import engine_of, serving_of

DOCS = Path(__file__).parents[3] / "docs"


def listed() -> set[str]:
    rl = (DOCS / "rl-serving.md").read_text().partition("## Routes")[2]
    serving = (DOCS / "serving.md").read_text().partition("## Routes")[2].partition("## ")[0]
    return set(re.findall(r"`(?:GET |POST )?(/[\w/]+)`", rl + serving))


def test_every_route_is_listed_and_every_listed_one_is_there(model_dir):
    with engine_of(model_dir) as engine:
        app = create_app(engine, serving_of(model_dir), ServerConfig())
        routes = {route.path for route in app.routes if isinstance(route, Route)}
    routes = {path.replace("{name:path}", "NAME") for path in routes}
    assert routes == listed()
