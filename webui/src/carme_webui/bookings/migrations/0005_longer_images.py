from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("bookings", "0004_data_of_sessions")]

    operations = [
        migrations.AlterField(
            model_name="booking",
            name="session_image",
            field=models.CharField(blank=True, max_length=128),
        )
    ]
