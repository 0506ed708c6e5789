from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [
        ("administration", "0001_initial"),
    ]

    operations = [
        migrations.RenameModel(old_name="Deed", new_name="AuditEntry"),
    ]
