"""A headless Chromium, and the few things of Prefect's UI that the tests touch."""

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
    """Debian's Chromium with an empty profile, which asks nobody but the pages it is shown.

    Skips where it is not installed.
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
    """The first visible element, as soon as there is one."""

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
    """Click a button or link; also one that still moves, as those of messages do."""
    browser.execute_script("arguments[0].click()", find(browser, xpath))


def log_in(browser: webdriver.Chrome, url: str, auth: str) -> None:
    """Open the UI, and give the page that asks for it the API's user:password."""
    browser.get(f"{url}/login")
    find(browser, "//input[@type='password']").send_keys(auth, Keys.ENTER)
    find(browser, "//a[normalize-space()='Deployments']")


def field_of(browser: webdriver.Chrome, name: str) -> WebElement:
    """The part of the run form that belongs to a parameter; it is drawn anew when it changes."""
    return find(
        browser,
        "//*[contains(concat(' ', @class, ' '), ' schema-form-property ')]"
        f"[.//*[@class='schema-form-property__label'][starts-with(normalize-space(), '{name}')]]",
    )


def description(browser: webdriver.Chrome, name: str) -> str:
    """What the form says of a parameter."""
    field = field_of(browser, name)
    return field.find_element(By.CLASS_NAME, "schema-form-property__description").text


def drop_down(browser: webdriver.Chrome, name: str) -> Select:
    """A parameter that is chosen from a list."""
    return Select(field_of(browser, name).find_element(By.TAG_NAME, "select"))


def write(browser: webdriver.Chrome, name: str, text: str) -> None:
    """Fill in a parameter that is a text."""
    field_of(browser, name).find_element(By.TAG_NAME, "textarea").send_keys(text)


def write_number(browser: webdriver.Chrome, name: str, number: int) -> None:
    """Fill in a parameter that is a number or none."""
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
