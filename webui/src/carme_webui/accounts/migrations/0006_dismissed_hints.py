from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("accounts", "0005_unix_names")]

    operations = [
        migrations.AddField(
            model_name="user",
            name="dismissed",
            field=models.JSONField(blank=True, default=list),
        )
    ]
