"use strict";
// The counts choose which claims of the ledger are shown; the same count again shows all.
const counts = [...document.querySelectorAll("button[data-verdict]")];
for (const button of counts) {
  button.addEventListener("click", () => {
    const chosen = button.getAttribute("aria-pressed") === "true" ? null : button.dataset.verdict;
    for (const other of counts) other.setAttribute("aria-pressed", String(other.dataset.verdict === chosen));
    for (const group of document.querySelectorAll(".ledger section")) {
      const claims = [...group.querySelectorAll(".claim")];
      for (const claim of claims) claim.hidden = chosen !== null && claim.dataset.verdict !== chosen;
      group.hidden = claims.every(claim => claim.hidden);
      group.querySelector("details").open = chosen !== null;
    }
  });
}
// A link into a folded experiment opens it.
const unfold = () => {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  if (target && target.tagName === "DETAILS") { target.open = true; target.scrollIntoView(); }
};
addEventListener("hashchange", unfold);
unfold();
