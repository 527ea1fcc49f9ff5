// Package iam owns who there is and what they may do: orgs, projects, users, service accounts, their keys and tokens,
// roles and the permission keys they stand for. It decides whether a principal may; what is done is the other slices'
// business.
package iam
