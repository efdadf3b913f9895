// What outlives a reload: the text, the settings and the choice of dark or light. Kept by this browser only.

const PLACE = "txl-page";

export function remembered() {
  try {
    return JSON.parse(localStorage.getItem(PLACE)) ?? {};
  } catch {
    return {};
  }
}

// False where the browser keeps nothing more: a text of several megabytes, or storage switched off.
export function remember(changes) {
  try {
    localStorage.setItem(PLACE, JSON.stringify({ ...remembered(), ...changes }));
    return true;
  } catch {
    return false;
  }
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");

export function startTheme(button) {
  const root = document.documentElement;
  const show = () => {
    const theme = root.dataset.theme ?? (prefersDark.matches ? "dark" : "light");
    button.setAttribute("aria-pressed", String(theme === "dark"));
  };
  if (remembered().theme) root.dataset.theme = remembered().theme;
  button.addEventListener("click", () => {
    root.dataset.theme = button.getAttribute("aria-pressed") === "true" ? "light" : "dark";
    remember({ theme: root.dataset.theme });
    show();
  });
  prefersDark.addEventListener("change", show);
  show();
}
