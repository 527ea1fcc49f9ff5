package cli_test

import (
	"encoding/json"
	"net/http"

	"github.com/gpuaas/gpuaas/pkg/client"
)

const (
	memberID     = "0192f0c0-0000-7000-8000-000000000030"
	attachmentID = "0192f0c0-0000-7000-8000-000000000031"
	operated     = "/projects/" + projectID + "/app-instances/" + instanceID
)

// serveMembers answers for an app instance that an external worker operates, and that another project uses, for the end
// of a service account, and for orgs.
func (h *fakeHub) serveMembers(w http.ResponseWriter, r *http.Request, route string) bool {
	instance := client.AppInstance{ID: instanceID, AppSlug: "slurm", Version: "1.0.0", Status: "running"}
	attachment := client.Attachment{
		ID: attachmentID, AppInstanceID: instanceID, ProjectID: projectID, AppSlug: "slurm", Version: "1.0.0",
		DisplayName: "shared", Status: "running", Endpoints: []client.Endpoint{{URL: "http://a"}, {URL: "http://b"}},
	}
	switch route {
	case "POST " + operated + "/members":
		var body client.MemberAdd
		_ = json.NewDecoder(r.Body).Decode(&body)
		instance.DisplayName = "with " + string(body.Role) + " " + body.AllocationID
		answer(w, 202, instance)
	case "POST " + operated + "/members/" + memberID + "/remove":
		instance.DisplayName = "without member"
		answer(w, 202, instance)
	case "POST " + operated + "/members/" + memberID + "/recover":
		instance.DisplayName = "with member again"
		answer(w, 202, instance)
	case "GET " + operated + "/tasks":
		answer(w, 200, client.TaskList{Items: []client.Task{{
			ID: tokenID, Kind: "member_add", State: client.TaskState(r.URL.Query().Get("state")), Phase: "join", Attempt: 3,
		}}})
	case "POST " + operated + "/attachments":
		answer(w, 201, attachment)
	case "GET " + operated + "/attachments/" + attachmentID:
		answer(w, 200, attachment)
	case "GET " + operated + "/attachments":
		attachment.DisplayName = "of the instance"
		answer(w, 200, client.AttachmentList{Items: []client.Attachment{attachment}})
	case "GET /projects/" + projectID + "/attachments":
		attachment.DisplayName = "of the project"
		answer(w, 200, client.AttachmentList{Items: []client.Attachment{attachment}})
	case "DELETE " + operated + "/attachments/" + attachmentID:
		w.WriteHeader(http.StatusNoContent)
	case "POST /projects/" + projectID + "/service-accounts/" + accountID + "/disable":
		account := h.account()
		account.Status = "disabled"
		answer(w, 200, account)
	case "DELETE /projects/" + projectID + "/service-accounts/" + accountID:
		w.WriteHeader(http.StatusNoContent)
	case "GET /orgs":
		answer(w, 200, client.OrgList{Items: []client.Org{{ID: orgID, Slug: "acme", DisplayName: "Acme"}}})
	default:
		return false
	}
	return true
}
