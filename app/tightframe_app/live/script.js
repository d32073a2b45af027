// The one script of a live page: it asks for the newest content, and puts in what has changed.
// Neither the less-than sign nor the ampersand is in it, so that the page stays well-formed XML, whose hash is that of the file.
const place = name => document.getElementById(name);
const known = new Map();
let version = "", asked = 0;

function within(part) {
  return [...part.querySelectorAll("[tabindex],summary,a")];
}
function kept(old, now) {
  const open = [...old.querySelectorAll("details")].map(item => item.open);
  [...now.querySelectorAll("details")].forEach((item, i) => { item.open = open[i] || false; });
  const focus = within(old).indexOf(document.activeElement);
  const across = [...old.querySelectorAll(".scroll")].map(item => item.scrollLeft);
  old.replaceWith(now);
  [...now.querySelectorAll(".scroll")].forEach((item, i) => { item.scrollLeft = across[i] || 0; });
  if (focus !== -1) within(now)[focus]?.focus({preventScroll: true});
}
function put(html) {
  const parts = [...new DOMParser().parseFromString(html, "text/html").body.children];
  const content = place("content");
  const same = parts.length === content.children.length
    ? parts.every((part, i) => part.id === content.children[i].id) : false;
  parts.forEach((part, i) => {
    const source = part.outerHTML;
    if (same) {
      if (known.get(part.id) !== source) kept(content.children[i], document.importNode(part, true));
    }
    known.set(part.id, source);
  });
  if (!same) content.replaceChildren(...parts);
}
function say(name, text) {
  if (place(name).textContent !== text) place(name).textContent = text;
  place(name).hidden = text === "";
}
async function look() {
  const now = new Date();
  let over = false;
  try {
    const headers = version === "" ? {} : {"If-None-Match": version};
    const answer = await fetch("state", {headers, cache: "no-store", redirect: "error"});
    if (answer.status === 200) {
      const state = await answer.json();
      version = answer.headers.get("ETag") || "";
      put(state.content);
      say("said", state.said);
      document.title = state.title;
      over = state.over;
    } else if (answer.status !== 304) throw new Error(String(answer.status));
    asked = now;
    say("lost", "");
    place("when").textContent = (over ? "Over; last looked at " : "Looked at ") + now.toLocaleTimeString();
  } catch (error) {
    const since = asked ? " since " + asked.toLocaleTimeString() : "";
    say("lost", "No answer from the command" + since + ". It has ended, or was started anew with another "
      + "link. What follows is what was seen last.");
  }
  if (!over) setTimeout(look, EVERY);
}
look();
