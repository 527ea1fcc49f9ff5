package event

import "slices"

// Types lists every type of event that the hub writes, as asyncapi.yaml describes them. Append refuses any other.
func Types() []string {
	return slices.Concat(catalogTypes(), fleetTypes(), iamTypes(), taskTypes(), webhookTypes(), []string{
		"apps.instance.requested",
		"apps.instance.deploying",
		"apps.instance.image_pull",
		"apps.instance.accelerator_health",
		"apps.instance.running",
		"apps.instance.upgrade_requested",
		"apps.instance.upgraded",
		"apps.instance.rollback_requested",
		"apps.instance.rolled_back",
		"apps.instance.start_requested",
		"apps.instance.stop_requested",
		"apps.instance.stopped",
		"apps.instance.decommission_requested",
		"apps.instance.decommissioned",
		"apps.instance.failed",
		"apps.instance.changed",
		"apps.instance.adopted",
		"apps.instance.attached",
		"apps.instance.detached",
		"apps.attachment.created",
		"apps.attachment.deleted",
		"apps.entitlement.updated",
		"apps.environment.removed",
		"apps.package_index.updated",
		"iam.access_credential.created",
		"iam.access_credential.rotated",
		"iam.access_credential.revoked",
		"security.wrapping_token.misused",
		"apps.secret.issued",
		"apps.secret.rotated",
		"apps.secret.revoked",
		"apps.publisher.registered",
		"apps.slug.released",
		"apps.slug.transferred",
		"capacity.allocation.pending",
		"capacity.allocation.active",
		"capacity.allocation.releasing",
		"capacity.allocation.released",
		"capacity.allocation.node_lost",
		"capacity.ssh_keys.updated",
		"capacity.volume.pending",
		"capacity.volume.ready",
		"capacity.volume.resizing",
		"capacity.volume.restoring",
		"capacity.volume.missing",
		"capacity.volume.deleting",
		"capacity.volume.deleted",
		"capacity.volume.node_lost",
		"capacity.volume_snapshot.pending",
		"capacity.volume_snapshot.ready",
		"capacity.volume_snapshot.deleting",
		"capacity.volume_snapshot.deleted",
		"capacity.sku.created",
		"capacity.sku.retired",
		"billing.credit.granted",
		"billing.price.created",
	})
}

// iamTypes are those of orgs, their users and roles, and service accounts.
func iamTypes() []string {
	return []string{
		"iam.user.created",
		"iam.user.disabled",
		"iam.user.enabled",
		"iam.user.roles_changed",
		"iam.user.project_roles_changed",
		"iam.user.removed",
		"iam.user.password_changed",
		"iam.user.tokens_revoked",
		"iam.user_token.created",
		"iam.user_token.revoked",
		"iam.session.revoked",
		"iam.invitation.created",
		"iam.invitation.revoked",
		"iam.org.created",
		"iam.org.quota_changed",
		"iam.project.created",
		"iam.role.created",
		"iam.role.changed",
		"iam.role.deleted",
		"iam.service_account.created",
		"iam.service_account.disabled",
		"iam.service_account.key_rotated",
		"iam.service_account.deleted",
	}
}

// webhookTypes are those of webhooks.
func webhookTypes() []string {
	return []string{
		"iam.webhook.created",
		"iam.webhook.enabled",
		"iam.webhook.disabled",
		"iam.webhook.secret_rotated",
		"iam.webhook.replay_requested",
		"iam.webhook.deleted",
	}
}

// catalogTypes are of artifacts and of the versions of apps.
func catalogTypes() []string {
	return []string{
		"apps.artifact.publish_requested",
		"apps.artifact.registered",
		"apps.artifact.activated",
		"apps.artifact.verified",
		"apps.artifact.promoted",
		"apps.artifact.deprecated",
		"apps.artifact.retired",
		"apps.artifact.revoked",
		"apps.version.registered",
		"apps.version.promoted",
		"apps.version.published",
		"apps.version.deprecated",
		"apps.version.retired",
	}
}

// fleetTypes are those of nodes and of the hub itself.
func fleetTypes() []string {
	return []string{
		"fleet.join_token.created",
		"fleet.node.enrolled",
		"fleet.node.certificate_renewed",
		"fleet.node.online",
		"fleet.node.offline",
		"fleet.node.draining",
		"fleet.node.undrained",
		"fleet.node.banned",
		"fleet.node.removed",
		"fleet.node.lost",
		"fleet.node.quarantined",
		"fleet.node.released",
		"fleet.node.accelerator_health",
		"fleet.node.document_refused",
		"fleet.node.adopted",
		"fleet.node.recovered",
		"hub.backup.verified",
		"hub.restored",
		"hub.recovery.finding",
		"hub.recovery.finding_resolved",
	}
}

func knownType(t string) bool { return slices.Contains(Types(), t) }

// taskTypes are those of the tasks and members of external workers; their subject is the app instance.
func taskTypes() []string {
	return []string{
		"apps.instance.task_requested",
		"apps.instance.task_claimed",
		"apps.instance.task_progressed",
		"apps.instance.task_completed",
		"apps.instance.task_failed",
		"apps.instance.task_cancelled",
		"apps.instance.member_changed",
	}
}
