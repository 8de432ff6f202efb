"""The `store.*` settings as environment variables, which reach every process of a run.

The only argument that a worker receives for the store is a URI. Endpoint, region and credentials
are in its environment, under the names that AWS's own tools use. Credentials are never settings:
boto3 finds them in the environment, a profile or a web identity.
"""

import os
from typing import Protocol

ENDPOINT = "AWS_ENDPOINT_URL_S3"
PATH_STYLE = "RETRACE_S3_PATH_STYLE"
"""Our own variable, because AWS defines no variable for this setting."""


class S3Settings(Protocol):
    """The `store.*` settings used here. The environment determines a setting that is None."""

    @property
    def endpoint(self) -> str | None:
        """URL of an S3 server other than AWS."""

    @property
    def region(self) -> str | None:
        """Region of the bucket."""

    @property
    def path_style(self) -> bool | None:
        """Whether the bucket is part of the URL's path instead of its host name."""

    @property
    def ca_bundle(self) -> str | None:
        """File with the CA certificates that verify the endpoint."""


def environment(settings: S3Settings) -> dict[str, str]:
    """Return the environment variables for the settings that are not None."""
    path_style = settings.path_style
    found = {
        ENDPOINT: settings.endpoint,
        "AWS_REGION": settings.region,
        "AWS_CA_BUNDLE": settings.ca_bundle,
        PATH_STYLE: None if path_style is None else str(path_style).lower(),
    }
    return {name: value for name, value in found.items() if value is not None}


def use_settings(settings: S3Settings) -> None:
    """Set the store's environment variables for this process and its child processes."""
    os.environ.update(environment(settings))
