"""The server's own certificate, which the hub delivered into the job's private folder."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificates:
    """Key and certificate of this server, and the authority of those who may talk to it and of the hub."""

    key: Path
    certificate: Path
    authority: Path

    @classmethod
    def of_job(cls) -> "Certificates | None":
        """Those of this job; None where the site's hub speaks plain HTTP.

        Raises:
            FileNotFoundError: Only some of the files are there.
        """
        folder = os.environ.get("CARME_JOB_FOLDER")
        if not folder:
            return None
        files = [
            Path(folder, "files", name) for name in ("singleuser.key", "singleuser.crt", "singleuser-ca.crt")
        ]
        missing = [file for file in files if not file.is_file()]
        if len(missing) == len(files):
            return None
        if missing:
            raise FileNotFoundError(
                f"The hub delivered its certificates without {missing[0].name}. Start the session again."
            )
        return cls(*files)

    def announce(self) -> None:
        """Set what JupyterHub's own code reads from the environment."""
        os.environ["JUPYTERHUB_SSL_KEYFILE"] = str(self.key)
        os.environ["JUPYTERHUB_SSL_CERTFILE"] = str(self.certificate)
        os.environ["JUPYTERHUB_SSL_CLIENT_CA"] = str(self.authority)
