"""The `store.*` settings as environment variables: how they reach every process of a run.

Workers are told a URI and nothing else; what the URI does not say (endpoint, region, credentials)
is in their environment, under the names that AWS's own tools use. Credentials are never settings:
boto3 finds them in the environment, a profile or a web identity.
"""

import os

from pipeline.config.tree import StoreSettings

PATH_STYLE = "RETRACE_S3_PATH_STYLE"
"""The only variable of our own: AWS has none for this."""


def environment(settings: StoreSettings) -> dict[str, str]:
    """The variables that say what the settings say; what is not set is left to the environment."""
    path_style = settings.path_style
    found = {
        "AWS_ENDPOINT_URL_S3": settings.endpoint,
        "AWS_REGION": settings.region,
        "AWS_CA_BUNDLE": settings.ca_bundle,
        PATH_STYLE: None if path_style is None else str(path_style).lower(),
    }
    return {name: value for name, value in found.items() if value is not None}


def use_settings(settings: StoreSettings) -> None:
    """Let this process, and all that it starts, reach the store as the settings say."""
    os.environ.update(environment(settings))
