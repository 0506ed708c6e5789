from django.db import migrations, models

import carme_webui.accounts.models


class Migration(migrations.Migration):
    dependencies = [("accounts", "0004_enrolled")]

    operations = [
        migrations.AlterField(
            model_name="user",
            name="username",
            field=models.CharField(
                error_messages={"unique": "There is already an account of that name."},
                max_length=64,
                unique=True,
                validators=[carme_webui.accounts.models.check_name],
                verbose_name="user name",
            ),
        )
    ]
