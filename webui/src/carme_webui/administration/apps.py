"""The Django app of administration; it says what is kept in the audit log."""

from django.apps import AppConfig, apps


def hidden(_value: str) -> str:
    """What the record shows of a secret: that it changed."""
    return "…"


class AdministrationConfig(AppConfig):
    name = "carme_webui.administration"
    label = "administration"

    def ready(self) -> None:
        from auditlog.registry import auditlog

        mask = "carme_webui.administration.apps.hidden"
        user, factor = apps.get_model("accounts", "User"), apps.get_model("mfa", "Authenticator")
        auditlog.register(
            user, mask_fields=["password"], exclude_fields=["last_login", "browser_zone"], mask_callable=mask
        )
        auditlog.register(factor, mask_fields=["data"], exclude_fields=["last_used_at"], mask_callable=mask)
        auditlog.register(
            apps.get_model("projects", "Project"), exclude_fields=["granted", "problem", "used"]
        )
        # What the portal itself notes each round is no change of anybody's.
        auditlog.register(
            apps.get_model("bookings", "Booking"),
            exclude_fields=["reserved", "problem", "used", "session_name"],
        )
        auditlog.register(
            apps.get_model("announcements", "Maintenance"), exclude_fields=["reserved", "problem"]
        )
        for app, model in [
            ("projects", "Membership"),
            ("projects", "Invitation"),
            ("images", "OwnImage"),
            ("administration", "AuditEntry"),
            ("announcements", "News"),
        ]:
            auditlog.register(apps.get_model(app, model))
