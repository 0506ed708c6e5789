from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("jobs", "0005_one_index_of_active_jobs")]

    operations = [
        migrations.AlterField(
            model_name="job",
            name="image",
            field=models.CharField(max_length=128, null=True),
        )
    ]
