"""The application: the routes, and the checks before them."""

from __future__ import annotations

from fastapi import FastAPI

from stoker.server import responses
from stoker.server.log_redaction import redactor
from stoker.server.routes import admin, clusters, code, files, logs, metrics, nodes, runs, storage
from stoker.server.security import ANYWHERE, Security, is_loopback
from stoker.server.services import Services


def create_app(services: Services) -> FastAPI:
    """Builds the application. Starts and stops nothing: the caller owns the services."""
    redactor.hide([services.token])
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.services = services
    for module in (admin, runs, logs, metrics, files, code, nodes, clusters, storage):
        app.include_router(module.router)
    responses.install(app, services.settings.home.root)
    app.add_middleware(Security, token=services.token, hosts=hosts_of(services), caps=code.CAPS)
    return app


def hosts_of(services: Services) -> tuple[str, ...]:
    """Names accepted in the Host header besides loopback: the configured ones, and the listening address."""
    server = services.settings.server
    listening = () if server.host in ANYWHERE or is_loopback(server.host) else (server.host,)
    return (*server.allowed_hosts, *listening)
