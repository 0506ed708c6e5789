from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("accounts", "0002_cache_table")]

    operations = [
        migrations.AddField(
            model_name="user",
            name="language",
            field=models.CharField(
                blank=True, choices=[("en", "English"), ("de", "Deutsch")], default="", max_length=8
            ),
            preserve_default=False,
        ),
        migrations.AddField(
            model_name="user",
            name="theme",
            field=models.CharField(
                blank=True, choices=[("light", "light"), ("dark", "dark")], default="", max_length=8
            ),
            preserve_default=False,
        ),
        migrations.AddField(
            model_name="user", name="wanted", field=models.JSONField(blank=True, default=dict)
        ),
    ]
