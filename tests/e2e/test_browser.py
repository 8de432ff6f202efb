"""Runs that a user starts from the form in Prefect's UI and watches or cancels there."""

import contextlib
import os
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By

from tests.e2e.browser import (
    add_item,
    chromium,
    description,
    drop_down,
    find,
    log_in,
    press,
    write,
    write_number,
)
from tests.e2e.installation import Installation
from tests.e2e.prefect_api import SINGLE, SMALL, FlowRun, Prefect
from tests.e2e.test_cancel import NEVER_STARTS, ends_cancelled, when_jobs_exist
from tests.patience import eventually

DEPLOYMENT = "//a[normalize-space()='retrace'][contains(@href, '/deployments/deployment/')]"
VIEW_RUN = "//button[normalize-space()='View run'] | //a[contains(@href, '/runs/flow-run/')]"
BADGE = "//header//*[contains(concat(' ', @class, ' '), ' state-badge ')]"


def open_the_run(browser: webdriver.Chrome) -> None:
    """Open the run's page from the notification of its start, or from the deployment's run list.

    The notification disappears after a few seconds, and the page below it may still be changing.
    """

    def look() -> bool:
        for link in browser.find_elements(By.XPATH, VIEW_RUN)[:1]:
            with contextlib.suppress(StaleElementReferenceException):
                browser.execute_script("arguments[0].click()", link)
        return "/runs/flow-run/" in browser.current_url

    eventually(look, lambda: f"the run's page, at {browser.current_url}")


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    """The folder for screenshots; RETRACE_SCREENSHOTS=docs/images replaces the ones in the docs."""
    return Path(os.environ.get("RETRACE_SCREENSHOTS", tmp_path))


def test_a_run_started_from_the_form_completes(
    prefect: Prefect, s3: dict[str, str], tmp_path: Path, screenshots: Path
):
    """The form lists the presets and describes every field. The run page shows the steps' log."""
    with chromium(tmp_path / "profile") as browser:
        log_in(browser, prefect.url, prefect.auth)
        browser.get(f"{prefect.url}/deployments")
        press(browser, DEPLOYMENT)
        press(browser, "//button[normalize-space()='Run']")
        press(browser, "//*[normalize-space()='Custom run']")

        parameters = prefect.deployment()["parameter_openapi_schema"]["properties"]
        assert set(parameters) == {"preset", "run_name", "router_replay", "steps", "overrides"}
        for name, field in parameters.items():
            assert description(browser, name) == " ".join(field["description"].split())
        presets = drop_down(browser, "preset")
        assert "quickstart" in [option.text for option in presets.options]
        presets.select_by_visible_text("quickstart")
        write(browser, "run_name", "from-the-form")
        write_number(browser, "steps", 2)
        for setting in SINGLE:
            add_item(browser, "overrides", setting)
        browser.save_screenshot(str(screenshots / "run-form.png"))
        for setting in SMALL:
            add_item(browser, "overrides", setting)
        press(browser, "//button[@type='submit'][normalize-space()='Submit']")

        open_the_run(browser)
        find(browser, BADGE)
        run = FlowRun(prefect, "from-the-form", browser.current_url.rpartition("/")[2])
        run.completes(within_s=600)
        browser.get(f"{prefect.url}/runs/flow-run/{run.id}")
        find(browser, f"{BADGE}[normalize-space()='Completed']")
        find(browser, "//body[contains(., 'step 1 of 2: ')]")
        browser.save_screenshot(str(screenshots / "run-page.png"))


def test_the_cancel_button_deletes_the_jobs_of_the_run(
    installed: Installation, prefect: Prefect, tmp_path: Path
):
    run = prefect.start("cancel-button", NEVER_STARTS)
    when_jobs_exist(installed, run)
    with chromium(tmp_path / "profile") as browser:
        log_in(browser, prefect.url, prefect.auth)
        browser.get(f"{prefect.url}/runs/flow-run/{run.id}")
        press(browser, "//header//button[normalize-space()='Cancel']")
        press(browser, "//button[normalize-space()='Confirm']")
        eventually(lambda: not installed.jobs(run), run.describe)
    ends_cancelled(installed, run)
