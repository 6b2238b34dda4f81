/**
 * Is this the script of small.html, a page of one head of a short text? build.mjs replaces the name, and leaves out what
 * such a page does not have: the other views, other heads, servers, what a large file holds instead of weights.
 */
declare const SMALL: boolean;
