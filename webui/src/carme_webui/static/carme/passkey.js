// Says on the page what went wrong with a passkey: the library's scripts report it by an event.
"use strict";

document.addEventListener("allauth.error", () => {
  const place = document.getElementById("webauthn-error");
  if (place) place.hidden = false;
});
