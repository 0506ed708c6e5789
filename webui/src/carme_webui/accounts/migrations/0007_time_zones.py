from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("accounts", "0006_dismissed_hints")]

    operations = [
        migrations.AddField(
            model_name="user",
            name="time_zone",
            field=models.CharField(blank=True, max_length=64, default=""),
            preserve_default=False,
        ),
        migrations.AddField(
            model_name="user",
            name="browser_zone",
            field=models.CharField(blank=True, editable=False, max_length=64, default=""),
            preserve_default=False,
        ),
    ]
