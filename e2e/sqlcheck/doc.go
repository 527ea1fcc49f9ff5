// Package sqlcheck holds one test: every migration and every SQL statement of the hub passes CockroachDB's own parser.
// It is a module of its own, because that parser and what it needs have no place in the product's list of dependencies.
package sqlcheck
