from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ("jobs", "0003_arrays"),
    ]

    operations = [
        migrations.AddIndex(
            model_name="job",
            index=models.Index(
                fields=["user"], name="active_jobs_of_user", condition=models.Q(("active", True))
            ),
        ),
    ]
