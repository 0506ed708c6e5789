from django.db import migrations, models


class Migration(migrations.Migration):
    """A project's jobs since some month are found by its account."""

    dependencies = [("jobs", "0007_planned_end")]

    operations = [
        migrations.AddIndex(
            model_name="job", index=models.Index(fields=["account", "submitted"], name="jobs_of_account")
        ),
    ]
