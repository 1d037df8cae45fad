// The API by Swagger UI, which comes with fastapi-offline, in our frame and colours.

import { urlOf } from "./common.js";

const DARK = matchMedia("(prefers-color-scheme: dark)");
const colour = () => document.documentElement.classList.toggle("dark-mode", DARK.matches);

colour();
DARK.addEventListener("change", colour);
window.SwaggerUIBundle({
  url: urlOf("openapi.json").href,
  dom_id: "#swagger",
  deepLinking: true,
  defaultModelsExpandDepth: -1,
  tryItOutEnabled: true,
  validatorUrl: null,
});
