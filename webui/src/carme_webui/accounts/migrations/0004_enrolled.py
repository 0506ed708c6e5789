from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("accounts", "0003_choices")]

    operations = [
        migrations.AddField(
            model_name="user",
            name="enrolled",
            field=models.DateTimeField(blank=True, editable=False, null=True),
        )
    ]
