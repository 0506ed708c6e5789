"""The portal as the site's OpenID Connect provider."""

from allauth.idp.oidc.adapter import DefaultOIDCAdapter
from allauth.idp.oidc.models import Client
from django.conf import settings

__all__ = ["HUB_CLIENT", "IdentityAdapter", "register_hub"]

HUB_CLIENT = "jupyterhub"


class IdentityAdapter(DefaultOIDCAdapter):
    """Tokens name the site's public address, also when the hub fetches them on the portal's local one."""

    def get_issuer(self) -> str:
        return settings.SITE.site.url


def register_hub() -> bool:
    """Make JupyterHub's client record what `carme.toml` and the secret say.

    Returns:
        Whether anything had to be changed.
    """
    site = settings.SITE
    secret = site.secret("oidc-client-secret")
    wanted = {
        "name": "JupyterHub",
        "type": Client.Type.CONFIDENTIAL,
        "grant_types": Client.GrantType.AUTHORIZATION_CODE.value,
        "response_types": Client.ResponseType.CODE.value,
        "scopes": "openid\nprofile",
        "default_scopes": "openid\nprofile",
        "redirect_uris": f"{site.site.url}{site.hub.base_path}hub/oauth_callback",
        # The site's own service: asking people whether they trust it would only teach them to click.
        "skip_consent": True,
    }
    client = Client.objects.filter(id=HUB_CLIENT).first() or Client(id=HUB_CLIENT, secret="")
    changed = client._state.adding
    for field, value in wanted.items():
        changed = changed or getattr(client, field) != value
        setattr(client, field, value)
    if not (client.secret and client.check_secret(secret)):
        client.set_secret(secret)
        changed = True
    if changed:
        client.save()
    return changed
