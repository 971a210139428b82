// The API's reference, from this server's own description of it. Requests that it tries have the page's key.

import { authorization, call } from "./server.js";

try {
  const spec = await (await call("/openapi.json")).json();
  window.SwaggerUIBundle({
    spec,
    dom_id: "#reference",
    deepLinking: true,
    validatorUrl: null, // the validator is on another host
    requestInterceptor: (request) => {
      Object.assign(request.headers, authorization());
      return request;
    },
  });
} catch (error) {
  document.getElementById("failure").textContent = error.message;
}
