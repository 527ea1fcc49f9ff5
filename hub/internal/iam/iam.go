// Package iam owns orgs, projects, users and service accounts, their keys and tokens, roles and permissions. It decides
// whether a principal may do something; other packages do it.
package iam
