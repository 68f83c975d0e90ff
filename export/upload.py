"""Send a folder to a hub repository (HF_ENDPOINT says which hub), in one commit."""

from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from ..errors import UserError, first_line

STATUS = {
    401: "the hub does not know your token; set HF_TOKEN or run `hf auth login`",
    403: "your token may not write there; make one with write access to it",
    404: "the hub does not show it to your token; check the name, and that the token may write there",
}


def check_repo(repo: str) -> None:
    """Refuse a name that is not OWNER/NAME."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"--repo {repo}: {first_line(error)}") from None
    if "/" not in repo:
        raise UserError(f"--repo {repo}: give OWNER/NAME")


def upload(folder: Path, repo: str, message: str, public: bool = False) -> str:
    """Returns the address of the repository. A repository that this makes is private unless `public`.

    Files that the hub has already are not sent again, so a second call finishes an interrupted one. The files become visible
    together, with the commit at the end. Raises UserError without a token or a network, and before a public repository is
    written that nobody asked for.
    """
    api = HfApi()
    try:
        address = str(api.create_repo(repo, private=not public, exist_ok=True))
        if not public and not api.repo_info(repo).private:
            raise UserError(f"{repo} is public already; say --public to push there")
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except OfflineModeIsEnabled:
        raise UserError("HF_HUB_OFFLINE is set: nothing can be pushed; unset it") from None
    except LocalTokenNotFoundError:
        raise UserError(f"{repo}: {STATUS[401]}") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        said = STATUS.get(status) or (
            f"the hub answered {status}: {error.server_message or first_line(error)}; run it again to go on"
        )
        raise UserError(f"{repo}: {said}") from None
    except (HTTPError, OSError) as error:
        raise UserError(
            f"{repo}: {constants.ENDPOINT} cannot be reached ({type(error).__name__}); run it again to go on"
        ) from None
    except RuntimeError as error:  # a file that did not arrive
        cause = first_line(error.__cause__) if error.__cause__ else "no cause is known"
        raise UserError(f"{repo}: {first_line(error)} {cause}; run it again to go on") from None
    return address
