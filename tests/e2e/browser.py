"""A headless Chromium, and functions for the parts of Prefect's UI that the tests use."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

from tests.patience import PATIENCE_S, eventually

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[webdriver.Chrome]:
    """Yield Debian's Chromium with an empty profile. It loads only the pages that a test opens.

    Skip the test if Chromium is not installed.
    """
    missing = [path for path in (CHROMIUM, DRIVER) if shutil.which(path) is None]
    if missing:
        pytest.skip(f"no {' and '.join(missing)}: install Debian's chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        "--window-size=1280,1240",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield browser
    finally:
        browser.quit()


def find(browser: webdriver.Chrome, xpath: str) -> WebElement:
    """Wait until a matching element is visible, and return the first such element."""

    def look() -> WebElement | None:
        with contextlib.suppress(StaleElementReferenceException):
            found = browser.find_elements(By.XPATH, xpath)
            return next((element for element in found if element.is_displayed()), None)
        return None

    def page() -> str:
        text = browser.find_element(By.TAG_NAME, "body").text
        return f"{xpath} at {browser.current_url}, which shows:\n{text}"

    return eventually(look, page)


def press(browser: webdriver.Chrome, xpath: str) -> None:
    """Click a button or link, even one that is still moving, such as those in notifications."""
    browser.execute_script("arguments[0].click()", find(browser, xpath))


def log_in(browser: webdriver.Chrome, url: str, auth: str) -> None:
    """Open the UI, and enter the API's user:password on its login page."""
    browser.get(f"{url}/login")
    find(browser, "//input[@type='password']").send_keys(auth, Keys.ENTER)
    find(browser, "//a[normalize-space()='Deployments']")


def field_of(browser: webdriver.Chrome, name: str) -> WebElement:
    """Return the section of the run form for a parameter.

    The form replaces this element whenever the parameter changes.
    """
    return find(
        browser,
        "//*[contains(concat(' ', @class, ' '), ' schema-form-property ')]"
        f"[.//*[@class='schema-form-property__label'][starts-with(normalize-space(), '{name}')]]",
    )


def description(browser: webdriver.Chrome, name: str) -> str:
    """Return the form's description of a parameter."""
    field = field_of(browser, name)
    return field.find_element(By.CLASS_NAME, "schema-form-property__description").text


def drop_down(browser: webdriver.Chrome, name: str) -> Select:
    """Return the drop-down list for a parameter."""
    return Select(field_of(browser, name).find_element(By.TAG_NAME, "select"))


def write(browser: webdriver.Chrome, name: str, text: str) -> None:
    """Fill in a text parameter."""
    field_of(browser, name).find_element(By.TAG_NAME, "textarea").send_keys(text)


def write_number(browser: webdriver.Chrome, name: str, number: int) -> None:
    """Fill in an optional number."""
    field_of(browser, name).find_element(By.XPATH, ".//button[normalize-space()='int']").click()
    box = ".//input"
    WebDriverWait(browser, PATIENCE_S).until(
        lambda b: field_of(b, name).find_elements(By.XPATH, box)
    )
    field_of(browser, name).find_element(By.XPATH, box).send_keys(str(number))


def add_item(browser: webdriver.Chrome, name: str, text: str) -> None:
    """Add an item to a parameter that is a list."""
    texts = len(field_of(browser, name).find_elements(By.TAG_NAME, "textarea"))
    field_of(browser, name).find_element(By.XPATH, ".//button[contains(., 'Add item')]").click()

    def new_box(_: object) -> WebElement | None:
        boxes = field_of(browser, name).find_elements(By.TAG_NAME, "textarea")
        return boxes[-1] if len(boxes) > texts else None

    box: WebElement = WebDriverWait(browser, PATIENCE_S).until(new_box)
    box.send_keys(text)
