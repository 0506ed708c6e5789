from django.db import migrations, models


class Migration(migrations.Migration):
    """When Slurm ends a job as things stand: later than its start and its limit say, if it was suspended."""

    dependencies = [("jobs", "0006_longer_images")]

    operations = [
        migrations.AddField(model_name="job", name="planned_end", field=models.DateTimeField(null=True)),
    ]
