package cli

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"

	"github.com/gpuaas/gpuaas/pkg/client"
)

func isID(s string) bool {
	ok, _ := regexp.MatchString(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`, s)
	return ok
}

// projectID is the project of --project, of the context, or the one that a service account belongs to.
func (s *session) projectID(ctx context.Context) (string, error) {
	want := s.project
	if want == "" {
		want = s.context.Project
	}
	if isID(want) {
		return want, nil
	}
	if want == "" {
		who, err := client.Read[client.Whoami](s.hub.Whoami(ctx))
		if err != nil {
			return "", err
		}
		if who.ProjectID == "" {
			return "", usage(errors.New("which project? Give --project ID or SLUG, or keep one: gpuaas context use NAME " +
				"--project SLUG"))
		}
		return who.ProjectID, nil
	}
	//nolint:bodyclose // client.All closes what it asks for
	return only(want, "project", s.projects(ctx), func(p client.Project) (string, bool) { return p.ID, p.Slug == want })
}

// orgID finds an org by id or slug; empty stays empty and means the caller's own.
func (s *session) orgID(ctx context.Context, want string) (string, error) {
	if want == "" || isID(want) {
		return want, nil
	}
	orgs := func(cursor string) (*http.Response, error) {
		return s.hub.ListOrgs(ctx, &client.ListOrgsParams{Cursor: cursor, Limit: client.PageSize})
	}
	return only(want, "org", orgs, func(o client.Org) (string, bool) { return o.ID, o.Slug == want })
}

// instanceID finds an app instance by id, or by display name while it is not decommissioned.
func (s *session) instanceID(ctx context.Context, project, want string) (string, error) {
	if isID(want) {
		return want, nil
	}
	instances := func(cursor string) (*http.Response, error) {
		return s.hub.ListAppInstances(ctx, project, &client.ListAppInstancesParams{Cursor: cursor, Limit: client.PageSize})
	}
	return only(want, "app instance", instances, func(i client.AppInstance) (string, bool) {
		return i.ID, i.DisplayName == want && i.Status != client.AppInstanceStatusDecommissioned
	})
}

// nodeID finds a node by id or host name.
func (s *session) nodeID(ctx context.Context, want string) (string, error) {
	if isID(want) {
		return want, nil
	}
	nodes := func(cursor string) (*http.Response, error) {
		return s.hub.ListNodes(ctx, &client.ListNodesParams{Cursor: cursor, Limit: client.PageSize})
	}
	return only(want, "node", nodes, func(n client.Node) (string, bool) { return n.ID, n.Hostname == want })
}

func (s *session) projects(ctx context.Context) func(string) (*http.Response, error) {
	return func(cursor string) (*http.Response, error) {
		return s.hub.ListProjects(ctx, &client.ListProjectsParams{Cursor: cursor, Limit: client.PageSize})
	}
}

// only gives the id of the one item that matches; names may be ambiguous, ids are not.
func only[T any](want, kind string, page func(string) (*http.Response, error),
	match func(T) (string, bool),
) (string, error) {
	found := ""
	for item, err := range client.All[T](page) {
		if err != nil {
			return "", err
		}
		id, ok := match(item)
		if ok && found != "" {
			return "", usage(fmt.Errorf("more than one %s is called %q; give the id", kind, want))
		}
		if ok {
			found = id
		}
	}
	if found == "" {
		return "", &client.Problem{Status: 404, Code: "not_found", Detail: fmt.Sprintf("There is no %s %q.", kind, want)}
	}
	return found, nil
}
