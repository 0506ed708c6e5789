// A part of the page that is renewed leaves what the reader has opened or closed as it is: the portal's HTML does not
// know which <details> are open, and htmx would take the attribute away. Only extensions of htmx can prevent that.
"use strict";

htmx.registerExtension("details", {
  htmx_before_morph_attr: (node, change) => node.tagName !== "DETAILS" || change.attrName !== "open",
});
