from django.db import migrations, models


class Migration(migrations.Migration):
    """The index of a user's active jobs finds those of all users as well, and PostgreSQL chose the larger one."""

    dependencies = [("jobs", "0004_active_jobs_of_user")]

    operations = [
        migrations.AlterField(model_name="job", name="active", field=models.BooleanField()),
    ]
