from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("profile", "0001_initial")]

    operations = [
        migrations.AddField("notice", "kind", models.CharField(default="account", max_length=24)),
        migrations.AddField("notice", "key", models.CharField(max_length=120, null=True)),
        migrations.AddField(
            "notice", "link", models.CharField(blank=True, default="", max_length=200), preserve_default=False
        ),
        migrations.AddField("notice", "on_page", models.BooleanField(default=True)),
        migrations.AddField(
            "notice",
            "mailing",
            models.CharField(
                blank=True,
                choices=[
                    ("", "None"),
                    ("due", "Due"),
                    ("being sent", "Being Sent"),
                    ("sent", "Sent"),
                    ("refused", "Refused"),
                ],
                default="",
                max_length=12,
            ),
        ),
        migrations.AddField("notice", "tries", models.IntegerField(default=0)),
        migrations.AddField("notice", "due", models.DateTimeField(null=True)),
        migrations.AddIndex(
            "notice",
            models.Index(condition=models.Q(("mailing", "due")), fields=["due"], name="notice_mail_due"),
        ),
        migrations.AddConstraint(
            "notice", models.UniqueConstraint(fields=("user", "key"), name="told_once")
        ),
    ]
