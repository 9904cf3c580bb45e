// Before the first paint: the scheme that was chosen here, else the system's. Not a module, so that it runs at once.
try {
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // A browser that keeps nothing shows the system's scheme.
}
